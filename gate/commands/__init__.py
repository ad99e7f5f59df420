"""One small module a command: parse, call, hand back an outcome. Light until a command runs."""
