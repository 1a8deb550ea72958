"""Steps of the model under a policy: the driver that calls the policy, the execution of its plans."""
