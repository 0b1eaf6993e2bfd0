"""The reference: plain torch, readable, on every device. It specifies te_mx's numbers."""
