"""A tier over Redis or Valkey: blocks as values, routing to servers, the protocol, quotas."""
