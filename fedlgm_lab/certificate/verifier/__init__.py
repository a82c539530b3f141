"""The public check of a privacy certificate (level 1).

It reads a certificate, a model file and optionally the released vectors, and imports neither
PyTorch, Flower nor Ray. Read `envelope`, `statement`, `plans`, `case`, `chain`, `replay` and
`checks`, in this order.

    python -m fedlgm_lab.certificate.verifier CERTIFICATE MODEL --key SIGNER.pub --witness WITNESS.pub
"""
