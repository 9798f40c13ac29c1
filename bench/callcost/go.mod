module github.com/purecuda/purecuda/bench/callcost

go 1.26

require (
	github.com/ebitengine/purego v0.11.3
	github.com/purecuda/purecuda v0.0.0
)

replace github.com/purecuda/purecuda => ../..
