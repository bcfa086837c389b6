module kip.test/hello

go 1.19
