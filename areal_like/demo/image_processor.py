"""The image processor of a made model, in the form of Qwen3-VL: an image takes a token for each square of 32 pixels."""

PATCH, MERGE = 16, 2  # pixels of a patch, and patches of a side of a token
FRAMES = 2  # an image is two equal frames
_SIZE = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 256 * (PATCH * MERGE) ** 2}  # in pixels
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": _SIZE,
}
VIDEO_PROCESSOR = {**PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}  # the servers load it too
del VIDEO_PROCESSOR["image_processor_type"]
