"""A tier over object storage: S3, Google Cloud Storage, Azure, or a folder that engines share."""
