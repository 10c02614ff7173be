"""The reader process: the only part of the service that talks to the driver."""
