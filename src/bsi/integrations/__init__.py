"""Interfaces to other libraries, each in one file and with an extra of its own.

| file | library | content |
|---|---|---|
| diffusers.py | diffusers | `BSIScheduler` for its training and sampling loops; its networks in `bsi.Model` |
| azula.py | azula | a model as an azula denoiser, for azula's samplers |
| sbi.py | sbi | a conditional density estimator for simulation-based inference |
| onnx.py | onnx, onnxruntime | the denoiser as an ONNX file, and such a file as a predictor |

Nothing else in the package imports this folder, and each file imports its library when it is itself imported.
"""
