"""Pipelines of many kinds against one device."""
