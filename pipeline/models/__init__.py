"""Model families: how their configs are read, their checkpoints' tensor names, their routing. Without torch,
for the loader and the supervisor."""
