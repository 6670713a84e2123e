"""A run's configuration: the schema, and how YAML and key=value overrides become one."""
