"""Infrastructure shared by training and evaluation: run folders, checkpoints, exports, ranks and memory."""
