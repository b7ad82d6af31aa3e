"""What each attention kernel costs at stated sizes, and how fast a device could be at best: `mcjax kernels`."""
