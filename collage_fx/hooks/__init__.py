"""All process-wide hooks into Dynamo, torch.optim and Python: what for, and what breaks without."""
