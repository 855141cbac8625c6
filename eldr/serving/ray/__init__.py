"""ELDR inside Ray Serve (extra `eldr[ray]`); Ray itself is imported when it is used."""

from eldr.serving.ray.app import build_eldr_pd_app
from eldr.serving.ray.config import RayConfig, read_config

__all__ = ["RayConfig", "build_eldr_pd_app", "read_config"]
