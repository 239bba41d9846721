"""Front end 1: the torch.compile backend, which gets a step as graphs of Dynamo."""
