"""Controllers of the broker's custom resources: turn objects into commands, and write the results back."""
