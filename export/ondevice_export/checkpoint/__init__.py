"""Finds and reads checkpoints: input is a directory, a file or a hub id, output are checked configurations and tensors.

Read `models` first: it opens target and drafter and checks every tensor's shape; `heads` does so for trained heads.

    source               local directories and GGUF files, or repositories on the hub, which are downloaded
    config               `config.json` in one spelling, which `families` reads; `json_fields` checks each field
    rope                 rotary frequencies of every type
    vision, audio        the towers of a target, if its checkpoint has them; `towers` is what both have in common
    named_tensors        tensors by the names that they have in a bundle
    directory            what all checkpoints offer; a directory's tensors, in one safetensors file (`safetensors_file`)
                         or in shards; `stacks` makes one tensor of the matrices of experts that lie there one by one
    quantized            checkpoints whose weights are quantised already
"""
