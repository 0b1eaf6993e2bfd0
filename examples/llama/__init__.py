"""What train_llama.py adds to the parts of gpt/: models of Transformers."""
