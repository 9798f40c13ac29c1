package ptx

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	const head = ".version 8.0\n.target sm_70\n.address_size 64\n"
	cases := []struct {
		name, text string
		want       map[string][]Param
		err        string
	}{
		{"none", head, map[string][]Param{}, ""},
		{"no parameters", head + ".visible .entry k() { ret; }", map[string][]Param{"k": nil}, ""},
		{"no list", head + ".entry k { ret; }", map[string][]Param{"k": nil}, ""},
		{
			"scalars", head + ".visible .entry k(\n .param .u64 k_p0,\n .param .f32 k_p1,\n .param .u8 k_p2,\n .param .b16 k_p3\n)\n{ ret; }",
			map[string][]Param{"k": {{0, 8}, {8, 4}, {12, 1}, {14, 2}}}, "",
		},
		{
			"array", head + ".entry k(.param .u32 a, .param .align 4 .b8 x[12], .param .align 16 .b8 y[20], .param .u64 z) { }",
			map[string][]Param{"k": {{0, 4}, {4, 12}, {16, 20}, {40, 8}}}, "",
		},
		{
			"pointers", head + ".entry k(.param .u64 .ptr .global .align 16 p, .param .u64 .ptr q) .maxntid 128, 1, 1 { }",
			map[string][]Param{"k": {{0, 8}, {8, 8}}}, "",
		},
		{
			"bodies and comments", head + "// .entry no()\n/* .entry no()\n */ .func (.param .b32 r) f(.param .b32 a) { { ret; } }\n.entry k() { .reg .pred %p<2>; @%p1 bra $L; $L: ret; }",
			map[string][]Param{"k": nil}, "",
		},
		{"two", head + ".entry a(.param .u32 n) {} .entry b() {}", map[string][]Param{"a": {{0, 4}}, "b": nil}, ""},
		{"declared", head + ".entry a(.param .u32 n);", map[string][]Param{"a": {{0, 4}}}, ""},
		{"no version", ".entry k() {}", nil, "before .version"},
		{"bad name", head + ".entry 5k() {}", nil, "line 4"},
		{"bad type", head + ".entry k(.param .u65 a) {}", nil, `unknown type ".u65"`},
		{"no type", head + ".entry k(.param a) {}", nil, "no type"},
		{"no .param", head + ".entry k(.u32 a) {}", nil, ".param is expected"},
		{"open list", head + ".entry k(.param .u32 a", nil, "parameter list"},
		{"open body", head + ".entry k() { ret;", nil, "unexpected end of file"},
		{"stray brace", head + "}", nil, "syntax error"},
		{"bad array", head + ".entry k(.param .b8 a[x]) {}", nil, "array size"},
		{"bad alignment", head + ".entry k(.param .align 3 .b8 a[4]) {}", nil, "alignment"},
		{"too large", head + ".entry k(.param .b8 a[40000]) {}", nil, "overflowed"},
		{"twice", head + ".entry k() {} .entry k() {}", nil, "duplicate"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			img, err := Parse(c.text)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error %v, want %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(img.Entries, c.want) {
				t.Errorf("got %v, want %v", img.Entries, c.want)
			}
		})
	}
}

func TestParseGlobals(t *testing.T) {
	img, err := Parse(".version 8.0 .visible .global .align 4 .u32 n = 5; .global .f32 a[3] = {0f0, 0f1, 0f2}; .const .align 8 .b8 c[2][5];")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]uint64{"n": 4, "a": 12, "c": 10}
	if !reflect.DeepEqual(img.Globals, want) {
		t.Errorf("got %v, want %v", img.Globals, want)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(".version 8.0\n.target sm_70\n.address_size 64\n.visible .global .align 4 .u32 counter;\n.visible .entry add(.param .u64 dst, .param .u32 n, .param .f32 by) { ret; }\n.visible .entry none { ret; }\n")
	f.Add(".version 8.0\n.entry k(.param .align 4 .b8 x[12], .param .u64 .ptr .align 8 p) { { } }")
	f.Add(".version 1 .global .v4 .f32 a[2]; /* \" */ \"")
	f.Fuzz(func(t *testing.T, text string) {
		img, err := Parse(text)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "ptxas ") {
				t.Errorf("error %q", err)
			}
			return
		}
		for name, params := range img.Entries {
			var end uintptr
			for _, p := range params {
				if p.Size == 0 || p.Offset < end {
					t.Errorf("%s: parameters %v overlap", name, params)
				}
				end = p.Offset + p.Size
			}
			if end > maxParams {
				t.Errorf("%s: %d bytes of parameters", name, end)
			}
		}
	})
}
