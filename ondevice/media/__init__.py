"""Pictures and sounds: files to soft tokens, which take places in a prompt like tokens but have embeddings, not ids.

In: a prompt's token ids with a placeholder for each picture and sound, and these. Out: the prompt with soft tokens, and
what encodes them when they are first needed. Imported only when a prompt has one. Read `prompt` first.

    prompt   replaces placeholders, checks counts against the context; `MediaEncoder` is what a model keeps
    encoded  keeps encoded pictures and sounds, and lets one be encoded at a time
    images   opens, limits, decodes and resizes a picture, with Pillow (the extra `[images]`)
    sounds   opens, limits, decodes and converts a sound, and makes spectrograms of it; not only WAV with `[audio]`
    videos   chooses frames of a video, which are pictures with times; files with PyAV (`[video]`)
    tower    runs a tower on ONNX Runtime: patches or a spectrogram to soft rows
"""
