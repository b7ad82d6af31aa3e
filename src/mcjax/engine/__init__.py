"""The life of a request on its instances: prefill, transfer, decode, and the step loop under them."""
