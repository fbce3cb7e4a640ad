"""Make the files of `exported/`, each by the library that it is named after.

`python -m tests.compatibility.make_exported NAME`, from the root of the repository, in an environment with it:

    tf2onnx    pip install tensorflow-cpu==2.21.0 keras==3.15.1 tf2onnx==1.17.0
    paddle     pip install paddlepaddle==3.3.1 paddle2onnx==2.1.0 packaging
    onnxsim    the environment of the tests, and onnxsim==0.8.1
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

EXPORTED = Path(__file__).parent / "exported"
SIDE, WIDTH, HEADS, CLASSES = 32, 16, 2, 5


def tf2onnx() -> None:
    import keras
    import tensorflow
    import tf2onnx as converter
    from keras import layers, ops

    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(1, *shape[1:]), name="table")

        def call(self, x):
            return x + self.table

    def stem(image, kind):
        if kind == "vit":
            return layers.Conv2D(WIDTH, 8, 8)(image)
        x = layers.Conv2D(8, 3, 2, padding="same", use_bias=False)(image)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return layers.Conv2D(WIDTH, 4, 4)(x)

    def gelu(kind):  # Keras' own exact GELU is written with Erfc, which ONNX does not have
        if kind == "vit":
            return lambda x: keras.activations.gelu(x, approximate=True)
        return lambda x: 0.5 * x * (1.0 + ops.erf(x / np.float32(np.sqrt(2))))

    def model(kind):
        image = keras.Input((SIDE, SIDE, 3), name="image")
        x = Positions()(layers.Reshape((16, WIDTH))(stem(image, kind)))
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h)
        h = layers.Dense(2 * WIDTH)(layers.LayerNormalization(epsilon=1e-6)(x))
        x = x + layers.Dense(WIDTH)(layers.Activation(gelu(kind))(h))
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(epsilon=1e-6)(x))
        return keras.Model(image, layers.Dense(CLASSES)(x))

    for kind, opset in (("vit", 13), ("conv", 17)):
        keras.utils.set_random_seed(0)
        network, generator = model(kind), np.random.default_rng(0)
        for value in network.weights:
            noise = 0.1 * generator.standard_normal(value.shape)
            if "seed" not in value.name:
                value.assign(value + (np.abs(noise) if "variance" in value.name else noise).astype(np.float32))
        signature = [tensorflow.TensorSpec((None, SIDE, SIDE, 3), tensorflow.float32, name="image")]
        function = tensorflow.function(
            lambda image, network=network: {"predictions": network(image, training=False)}, input_signature=signature
        )
        path = EXPORTED / f"tf2onnx_{kind}_opset{opset}.onnx"
        converter.convert.from_function(function, input_signature=signature, opset=opset, output_path=str(path))


def paddle() -> None:
    import tempfile

    import paddle as library
    import paddle2onnx
    from paddle import nn

    class Attention(nn.Layer):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            tokens = x.shape[1]
            merged = self.qkv(x).reshape((-1, tokens, 3, HEADS, WIDTH // HEADS)).transpose((2, 0, 3, 1, 4))
            scores = merged[0] @ merged[1].transpose((0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5
            mixed = nn.functional.softmax(scores, axis=-1) @ merged[2]
            return self.proj(mixed.transpose((0, 2, 1, 3)).reshape((-1, tokens, WIDTH)))

    class Network(nn.Layer):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2D(3, 8, 3, 2, 1, bias_attr=False), nn.BatchNorm2D(8)
            self.patches, self.attention = nn.Conv2D(8, WIDTH, 4, 4), Attention()
            self.class_token = self.create_parameter((1, 1, WIDTH))
            self.positions = self.create_parameter((1, 17, WIDTH))
            self.norms = nn.LayerList([nn.LayerNorm(WIDTH, epsilon=1e-6) for _ in range(3)])
            self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.patches(nn.functional.relu(self.norm(self.stem(x)))).flatten(2).transpose((0, 2, 1))
            token = self.class_token.expand((library.shape(x)[0], -1, -1))
            x = library.concat((token, x), axis=1) + self.positions
            x = x + self.attention(self.norms[0](x))
            x = x + self.second(nn.functional.gelu(self.first(self.norms[1](x))))
            return self.head(self.norms[2](x)[:, 0])

    library.seed(0)
    network = Network()
    network.eval()
    for value in network.parameters():
        value.set_value(value + 0.1 * library.randn(value.shape))
    shape = [library.static.InputSpec([None, 3, SIDE, SIDE], "float32", name="x")]
    with tempfile.TemporaryDirectory() as folder:
        library.jit.save(library.jit.to_static(network, input_spec=shape, full_graph=True), f"{folder}/network")
        path = EXPORTED / "paddle_vit_opset16.onnx"
        files = [f"{folder}/network.{ending}" for ending in ("json", "pdiparams")]
        paddle2onnx.export(*files, save_file=str(path), opset_version=16)


def onnxsim() -> None:
    import onnx
    import onnxsim as library

    from tests.compatibility.graphs import VIT, TorchScript, timm_model

    path = EXPORTED / "onnxsim_vit_opset14.onnx"
    TorchScript(lambda: timm_model("VisionTransformer", **{**VIT, "embed_dim": WIDTH}), 14, ["logits"])(path)
    simplified, equal = library.simplify(onnx.load(path))
    assert equal
    onnx.save(simplified, path)


if __name__ == "__main__":
    {"tf2onnx": tf2onnx, "paddle": paddle, "onnxsim": onnxsim}[sys.argv[1]]()
