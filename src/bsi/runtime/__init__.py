"""What training and evaluation share: run folders, checkpoints, exports, ranks, memory."""
