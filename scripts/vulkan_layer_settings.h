// Forced into every C++ file of llama.cpp (-include) by scripts/bootstrap where the Vulkan headers are older than 1.3.272.
//
// llama.cpp's Vulkan backend names VK_EXT_layer_settings in any case (ggml_vk_instance_init in
// ggml/src/ggml-vulkan/ggml-vulkan.cpp), and uses it only where a validation layer offers it. Here are the three names,
// laid out as vulkan_core.h has them since 1.3.272. With newer headers, or in a file without any, this has no effect.
#pragma once
#if defined(__has_include)
#if __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>
#ifndef VK_EXT_layer_settings
#include <cstdint>
#include <vector>
namespace vk {
enum class LayerSettingTypeEXT { eBool32 = 0 };
struct LayerSettingEXT {
    const char *layer_name;
    const char *setting_name;
    LayerSettingTypeEXT type;
    uint32_t value_count;
    const void *values;
};
struct LayerSettingsCreateInfoEXT {
    VkStructureType type = static_cast<VkStructureType>(1000496000);  // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void *next = nullptr;
    uint32_t setting_count;
    const LayerSettingEXT *settings;
    LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> &given)
        : setting_count(static_cast<uint32_t>(given.size())), settings(given.data()) {}
};
}  // namespace vk
#endif
#endif
#endif
