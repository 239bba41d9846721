"""The way from a Dynamo graph to a callable that binds the residuals of its states."""
