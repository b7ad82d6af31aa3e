"""What can be shown of kernels where no accelerator is: see docs/kernels-proof.md."""
