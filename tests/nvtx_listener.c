/* An NVTX tool for tests: NVTX_INJECTION64_PATH names it, and it prints every range to the file in
   NVTX_LISTENER_OUT, one line each: "push DOMAIN NAME CATEGORY PAYLOAD" or "pop DOMAIN". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <nvtx3/nvToolsExt.h>

enum { most = 256 };
static const char *domains[most], *strings[most], *categories[most];
static intptr_t domain_count = 1, string_count = 1;
static FILE *out;

static const char *copy(const char *text) { return strdup(text ? text : ""); }

static nvtxDomainHandle_t domain_create(const char *name) {
    domains[domain_count] = copy(name);
    return (nvtxDomainHandle_t)domain_count++;
}

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
    (void)domain;
    strings[string_count] = copy(text);
    return (nvtxStringHandle_t)string_count++;
}

static void name_category(nvtxDomainHandle_t domain, uint32_t id, const char *name) {
    (void)domain;
    if (id < most) categories[id] = copy(name);
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *a) {
    const char *name = a->messageType == NVTX_MESSAGE_TYPE_REGISTERED
                           ? strings[(intptr_t)a->message.registered]
                           : a->messageType == NVTX_MESSAGE_TYPE_ASCII ? a->message.ascii : "?";
    const char *category = a->category && a->category < most ? categories[a->category] : "-";
    fprintf(out, "push %s %s %s %lld\n", domains[(intptr_t)domain], name, category ? category : "-",
            (long long)a->payload.llValue);
    return 0;
}

static int pop(nvtxDomainHandle_t domain) {
    fprintf(out, "pop %s\n", domains[(intptr_t)domain]);
    fflush(out);
    return 0;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
    const NvtxExportTableCallbacks *table = get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable functions;
    unsigned int size = 0;
    if (!table || !table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size)) return 0;
    out = fopen(getenv("NVTX_LISTENER_OUT"), "a");
    if (!out) return 0;
    *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create;
    *functions[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *functions[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
    *functions[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *functions[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
