"""Horovod's callbacks for the Keras that ``tf.keras`` is."""

from whale.frontends.horovod.callbacks import callback_classes

_CLASSES = callback_classes("tensorflow.keras")
BroadcastGlobalVariablesCallback = _CLASSES["BroadcastGlobalVariablesCallback"]
MetricAverageCallback = _CLASSES["MetricAverageCallback"]
LearningRateScheduleCallback = _CLASSES["LearningRateScheduleCallback"]
LearningRateWarmupCallback = _CLASSES["LearningRateWarmupCallback"]
