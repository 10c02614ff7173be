"""Stands before a package of the development environment, which a user's installation lacks.

The Kubernetes client loads it where it is there, which takes longer than all else at the start.
"""

raise ModuleNotFoundError(f"{__name__} is not installed where the service runs")
