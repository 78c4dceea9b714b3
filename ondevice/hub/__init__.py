"""Ready bundles from the Hugging Face hub, over HTTPS.

By the standard library, although the extra `[export]` brings huggingface_hub: a machine that only runs bundles does not
have it, a bundle says itself which hashes its files have, and one way to fetch them is enough.
"""
