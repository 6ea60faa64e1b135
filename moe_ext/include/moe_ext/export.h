// MOE_EXT_API marks what libmoe_ext.so exports; everything else in it is hidden.
#pragma once

#define MOE_EXT_API __attribute__((visibility("default")))
