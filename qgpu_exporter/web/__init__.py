"""The HTTP side: routes, the status page, TLS and who may ask; it shows what a view gives it."""
