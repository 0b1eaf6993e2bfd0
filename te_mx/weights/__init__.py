"""What a weight is: quantized for some calls, frozen, codes alone, split, traced."""
