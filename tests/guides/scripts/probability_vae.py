"""A variational autoencoder of TensorFlow Probability's layers: a prior, a KL regulariser, a Bernoulli decoder."""

import numpy as np
import tensorflow_probability as tfp
import tf_keras as keras

layers, tfpl, tfd = keras.layers, tfp.layers, tfp.distributions
images = np.random.default_rng(0).uniform(size=(48, 36)).astype("float32")
prior = tfd.Independent(tfd.Normal(loc=np.zeros(2, "float32"), scale=1.0), reinterpreted_batch_ndims=1)
encoder = keras.Sequential(
    [
        layers.InputLayer((36,)),
        layers.Dense(12, activation="relu"),
        layers.Dense(tfpl.IndependentNormal.params_size(2)),
        tfpl.IndependentNormal(
            2,
            convert_to_tensor_fn=lambda d: d.mean(),
            activity_regularizer=tfpl.KLDivergenceRegularizer(prior, use_exact_kl=True),
        ),
    ]
)
decoder = keras.Sequential(
    [
        layers.InputLayer((2,)),
        layers.Dense(12, activation="relu"),
        layers.Dense(tfpl.IndependentBernoulli.params_size(36)),
        tfpl.IndependentBernoulli((36,), tfd.Bernoulli.logits),
    ]
)
vae = keras.Model(inputs=encoder.inputs, outputs=decoder(encoder.outputs[0]))
vae.compile(optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-5), loss=lambda x, made: -made.log_prob(x))
history = vae.fit(images, images, batch_size=16, epochs=2, verbose=0)
result = {**history.history, "weights": vae.get_weights()}
