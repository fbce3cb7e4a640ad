// As much of DeepStream's interface as a parser of outputs uses, with the names, the order of fields and the numbers that
// NVIDIA documents (NVIDIA/DeepStream 9.1, includes/nvdsinfer.h and nvdsinfer_custom_impl.h).
#pragma once

#include <string>
#include <vector>

typedef enum { FLOAT = 0, HALF = 1, INT8 = 2, INT32 = 3, INT64 = 4, UINT8 = 5 } NvDsInferDataType;

struct NvDsInferDims {
    unsigned int numDims;
    unsigned int d[8];
    unsigned int numElements;
};

struct NvDsInferLayerInfo {
    NvDsInferDataType dataType;
    NvDsInferDims inferDims;
    int bindingIndex;
    const char* layerName;
    void* buffer;
    int isInput;
};

struct NvDsInferNetworkInfo {
    unsigned int width, height, channels;
};

struct NvDsInferObjectDetectionInfo {
    unsigned int classId;
    float left, top, width, height, detectionConfidence, rotation_angle;
};

struct NvDsInferAttribute {
    unsigned int attributeIndex, attributeValue;
    float attributeConfidence;
    char* attributeLabel;
};

struct NvDsInferParseDetectionParams {
    unsigned int numClassesConfigured;
    std::vector<float> perClassPreclusterThreshold, perClassPostclusterThreshold;
};

#define CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(function)                                                    \
    extern "C" bool function(const std::vector<NvDsInferLayerInfo>&, const NvDsInferNetworkInfo&,      \
                             const NvDsInferParseDetectionParams&, std::vector<NvDsInferObjectDetectionInfo>&)
#define CHECK_CUSTOM_CLASSIFIER_PARSE_FUNC_PROTOTYPE(function)                                         \
    extern "C" bool function(const std::vector<NvDsInferLayerInfo>&, const NvDsInferNetworkInfo&, float, \
                             std::vector<NvDsInferAttribute>&, std::string&)
