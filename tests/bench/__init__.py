"""Measurements, each as a ratio against something in the same run; no test's verdict."""
