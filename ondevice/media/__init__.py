"""Pictures: files to soft tokens, which take places in a prompt like tokens, and have embeddings instead of ids.

In: a prompt's token ids with a placeholder for each picture, and the pictures. Out: the prompt with soft tokens, and
what encodes them when they are first needed. Imported only when a prompt has a picture. Read `prompt` first.

    prompt   replaces placeholders, checks counts against the context; `MediaEncoder` is what a model keeps
    encoded  keeps encoded pictures, and lets one be encoded at a time
    images   opens, limits, decodes and resizes a picture, with Pillow (the extra `[images]`)
    tower    runs the vision tower on ONNX Runtime: patches to soft rows
"""
