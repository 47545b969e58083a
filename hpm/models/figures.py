"""The registry's models in numbers, as `hpm.models.describe` counts them; see `Description`.

A test recounts every line, and says what a new one must be.
"""

__all__ = ['FIGURES']

# Parameters, multiply-adds an image, image size, usual batch size of a device, source.
FIGURES = {
  'trivial': (4255721, 4250624, 224, 32, 'tf_cnn_benchmarks'),
  'lenet': (2172840, 14034432, 28, 32, 'after LeCun et al. 1998'),
  'alexnet': (61100840, 714188480, 224, 512, 'Krizhevsky, arXiv:1404.5997'),
  'googlenet': (6624904, 1498376192, 224, 32, 'Szegedy et al., arXiv:1409.4842'),
  'inception1': (6998552, 1582671872, 224, 32, 'Szegedy et al., arXiv:1409.4842'),
  'inception3': (27161264, 5713216096, 299, 32, 'Szegedy et al., arXiv:1512.00567'),
  'inception4': (42679816, 12253974624, 299, 32, 'Szegedy et al., arXiv:1602.07261'),
  'vgg11': (132863336, 7609090048, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg13': (133047848, 11308466176, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg16': (138357544, 15470264320, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg19': (143667240, 19632062464, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg11_bn': (132868840, 7609090048, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg13_bn': (133053736, 11308466176, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg16_bn': (138365992, 15470264320, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'vgg19_bn': (143678248, 19632062464, 224, 64, 'Simonyan & Zisserman, arXiv:1409.1556'),
  'resnet18': (11689512, 1814073344, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet34': (21797672, 3663761408, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet50': (25557032, 3857973248, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet101': (44549160, 7570194432, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet152': (60192808, 11282415616, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet200': (64673832, 14776270848, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet50_v1.5': (25557032, 4089184256, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet101_v1.5': (44549160, 7801405440, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet152_v1.5': (60192808, 11513626624, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet200_v1.5': (64673832, 15007481856, 224, 64, 'He et al., arXiv:1512.03385'),
  'resnet18_v2': (11687720, 1814073344, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet34_v2': (21795880, 3663761408, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet50_v2': (25549352, 3857973248, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet101_v2': (44541480, 7570194432, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet152_v2': (60185128, 11282415616, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet200_v2': (64666152, 14776270848, 224, 64, 'He et al., arXiv:1603.05027'),
  'resnet20': (269722, 40551040, 32, 128, 'He et al., arXiv:1512.03385'),
  'resnet32': (464154, 68862592, 32, 128, 'He et al., arXiv:1512.03385'),
  'resnet44': (658586, 97174144, 32, 128, 'He et al., arXiv:1512.03385'),
  'resnet56': (853018, 125485696, 32, 128, 'He et al., arXiv:1512.03385'),
  'resnet110': (1727962, 252887680, 32, 128, 'He et al., arXiv:1512.03385'),
  'resnet20_v2': (269722, 40551040, 32, 128, 'He et al., arXiv:1603.05027'),
  'resnet32_v2': (464154, 68862592, 32, 128, 'He et al., arXiv:1603.05027'),
  'resnet44_v2': (658586, 97174144, 32, 128, 'He et al., arXiv:1603.05027'),
  'resnet56_v2': (853018, 125485696, 32, 128, 'He et al., arXiv:1603.05027'),
  'resnet110_v2': (1727962, 252887680, 32, 128, 'He et al., arXiv:1603.05027'),
  'densenet121': (7978856, 2834161664, 224, 32, 'Huang et al., arXiv:1608.06993'),
  'mobilenet_v2': (3504872, 300774272, 224, 32, 'Sandler et al., arXiv:1801.04381'),
}
