"""Interfaces to other libraries: diffusers, azula, sbi and ONNX, each in one file and with an extra of its own.

Nothing else in the package imports this folder, and each file imports its library when it is itself imported.
"""
