"""All process-wide hooks into Dynamo, torch.optim and Python, each with its purpose."""
