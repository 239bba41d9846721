"""Front end 2: the parts of a step that Dynamo never hands over, one operation at a time."""
