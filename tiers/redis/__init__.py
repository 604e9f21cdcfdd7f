"""A tier over Redis or Valkey: values, the servers that have them, replies, quotas."""
