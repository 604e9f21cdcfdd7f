"""Blocks as objects of S3, Google Cloud Storage, Azure, or of a folder that engines share."""
