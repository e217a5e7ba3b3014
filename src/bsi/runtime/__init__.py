"""What training and evaluation share: ranks, run folders, checkpoints, exports. Nothing here trains."""
