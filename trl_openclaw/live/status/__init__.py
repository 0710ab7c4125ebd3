"""The status page: what was said, what was made of it, and which version answers. Served by the gateway at `/`."""

from .api import status_router

__all__ = ["status_router"]
