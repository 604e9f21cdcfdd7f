"""Commands about running caches: what they hold and do, and changes to it."""
