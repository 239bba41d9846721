"""From a graph of Dynamo to a callable that binds the residuals of its states."""
