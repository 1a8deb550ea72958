"""Steps through the model under a policy: the order in which it is asked, its execution, observers."""
