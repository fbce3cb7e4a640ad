// Calls a parser as Gst-nvinfer does: main FOLDER WIDTH HEIGHT CLASSES THRESHOLD NAME:TYPE:COUNT...
// prints a line for each object or attribute.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include PARSER

int main(int argc, char** argv) {
    const std::string folder = argv[1];
    const NvDsInferNetworkInfo network{unsigned(std::atoi(argv[2])), unsigned(std::atoi(argv[3])), 3};
    const std::vector<float> thresholds(size_t(std::atoi(argv[4])), float(std::atof(argv[5])));
    std::vector<std::vector<char>> buffers;
    std::vector<NvDsInferLayerInfo> layers;
    for (int i = 6; i < argc; ++i) {
        char* name = std::strtok(argv[i], ":");
        NvDsInferLayerInfo layer{};
        layer.layerName = name;
        layer.dataType = NvDsInferDataType(std::atoi(std::strtok(nullptr, ":")));
        layer.inferDims.numElements = unsigned(std::atoi(std::strtok(nullptr, ":")));
        std::ifstream file(folder + "/" + name, std::ios::binary);
        buffers.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        layers.push_back(layer);
    }
    for (size_t i = 0; i < layers.size(); ++i) layers[i].buffer = buffers[i].data();
#ifdef BOXES
    NvDsInferParseDetectionParams params;
    params.numClassesConfigured = unsigned(thresholds.size());
    params.perClassPreclusterThreshold = thresholds;
    std::vector<NvDsInferObjectDetectionInfo> objects;
    if (!NvDsInferParseVitdeployBoxes(layers, network, params, objects)) return 3;
    for (const auto& each : objects)
        std::printf("%u %.9g %.9g %.9g %.9g %.9g\n", each.classId, double(each.detectionConfidence), double(each.left),
                    double(each.top), double(each.left + each.width), double(each.top + each.height));
#else
    std::vector<NvDsInferAttribute> attributes;
    std::string text;
    if (!NvDsInferParseVitdeployClass(layers, network, thresholds[0], attributes, text)) return 3;
    for (const auto& each : attributes) std::printf("%u %.9g\n", each.attributeValue, double(each.attributeConfidence));
#endif
}
