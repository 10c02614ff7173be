"""What the API server says of this node's pods, of the node itself and of its devices.

Every source here is a copy of one selection of objects: `latest` is the copy, `health` how the
source does, and `run(changed)` keeps both current until it is cancelled.
"""
