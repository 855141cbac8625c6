"""Metadata is in pyproject.toml; this file only builds the optional native extensions."""

from setuptools import setup

setup()
