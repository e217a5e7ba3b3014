"""A Gradio app for a Space on Hugging Face: samples of a trained model, and the belief that leads to each of them.

Set MODEL to the name of a bundled network, a folder of `Model.save_pretrained`, or a repository USER/NAME of the hub.
"""

import os

import numpy as np

import bsi
from bsi.sampling import belief

MODEL = os.environ.get("MODEL", "digits")
SCALE = 8  # pixels of the page for each pixel of an image

model = bsi.Model.from_pretrained(MODEL)


def pixels(x: np.ndarray) -> np.ndarray:
    """Values of one image, channels first, as 8-bit pixels, enlarged."""
    low, high = model.bins.low, model.bins.high
    image = np.clip(255 * (x - low) / (high - low), 0, 255).astype(np.uint8)
    return np.moveaxis(image, 0, -1).squeeze().repeat(SCALE, 0).repeat(SCALE, 1)


def draw(num: int, steps: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Samples, and the belief means of the first one from broad to sharp."""
    means = []
    for step in model.trajectory(int(num), steps=int(steps), seed=int(seed)):
        means.append(pixels(belief(model.method, step).mean[0].numpy()))
        samples = step.x_hat
    return [pixels(x) for x in samples.numpy()], means


def build():
    import gradio as gr

    with gr.Blocks(title=f"bsi: {MODEL}") as page:
        gr.Markdown("A belief about an unknown image is sharpened by noisy measurements of what a network predicts.")
        with gr.Row():
            num = gr.Slider(1, 32, 8, step=1, label="samples")
            steps = gr.Slider(2, 64, 16, step=1, label="steps")
            seed = gr.Number(0, precision=0, label="seed")
        samples = gr.Gallery(label="samples", columns=8)
        beliefs = gr.Gallery(label="belief about the first one", columns=8)
        gr.Button("Draw").click(draw, [num, steps, seed], [samples, beliefs])
    return page


if __name__ == "__main__":
    build().launch()
