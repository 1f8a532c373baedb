"""The proxy: any agent's model calls, captured token by token, answered only once they are durable."""
